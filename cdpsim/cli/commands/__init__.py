"""The commands of cdpsim: what each one asks for, and how it is served."""
