"""A job: the settings of a training as data, the file that holds them, and the rules that check them."""
