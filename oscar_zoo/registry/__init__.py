"""Which artifact a name means and where it is: recipes, catalog, store, pull, publish."""
