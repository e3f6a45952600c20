"""Copies of the state of ranks in memory that outlives them, so that a lost rank costs seconds.

    /dev/shm/echelon-memory-1000-4f0c…/       of one run, on one host; for this user alone
        owner                                 the process that removes it, and the folder of the run
        generation-0/
            rank-00000.safetensors            all that rank 0 owns, shared with no other rank
            rank-00000.00000100-5d2e….json    its manifest: step 100, of one save; the file is whole
            rank-00002.safetensors            the copy of a rank of another host
        generation-1/                         the same, of the save before or after it

folder       where the files of a run are; a file in memory, which is written like a tensor
rank_file    what a rank owns, in its file; and those of all ranks as a checkpoint on disk, where no rank will
             go on from memory
keeper       all of it, for an engine: save every so many steps, send to another host, find the newest that is
             whole
"""
