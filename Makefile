lint:
	ruff check . && ruff format --check . && mypy && lint-imports
