"""The zoo's page: a static catalogue of artifacts that needs no server and no network."""
