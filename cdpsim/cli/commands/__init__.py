"""The commands of cdpsim: the arguments of each, and the function that serves it."""
