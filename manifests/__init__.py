"""Packaged manifests `<Model>/<tag>.json` and the JSON Schema; importable as
`oscar_zoo.manifests`."""
