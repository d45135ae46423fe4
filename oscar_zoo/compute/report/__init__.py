"""The report of a fit: one page, one picture, and the numbers behind both."""
