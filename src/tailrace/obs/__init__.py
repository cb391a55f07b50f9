"""What people see of a run: the fold of its journal, and tables, charts, stories and the terminal on top of it."""
