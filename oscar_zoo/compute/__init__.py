"""Rotations from data: capture, moments, estimators, methods, fit. Needs torch."""
