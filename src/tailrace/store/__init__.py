"""What a run leaves on disk: one SQLite file that any client opens."""
