"""What a person looks at after and during a run: one page, from the run folder alone.

run_files      what is in the folder, whatever state it is in
trace_reader   trace.json → spans
analysis       spans → overlap, idle time, stragglers, the critical path
foresight      what the planner and a dry run predict for the job
contents       all of it as plain data, in the words of the page
page           the data and the script that draws them, as one HTML file; its server while a run goes on
live_chart     a small chart of it, below a notebook's cell
"""
