"""Training where one process, the coordinator, runs the script, and others compute and hold the variables."""
