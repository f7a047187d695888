"""What goes wrong in a run, and how the run reports it and ends."""
