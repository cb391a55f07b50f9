"""What people look at: tables, stories, plots, progress."""
