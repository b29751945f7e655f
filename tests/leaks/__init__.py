"""Nothing is left behind: the four services in one process, under load, measured from inside."""
