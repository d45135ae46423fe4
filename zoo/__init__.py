"""Model recipes, one TOML file each; importable as `oscar_zoo.recipes`."""
