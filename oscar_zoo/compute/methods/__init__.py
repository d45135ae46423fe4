"""The fitting methods."""
