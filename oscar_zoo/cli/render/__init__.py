"""What the command line prints: tables, progress, and the lines of results and errors."""
