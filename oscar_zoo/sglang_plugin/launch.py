"""Launch plans. Torch-free."""
