"""Engines that run a model over calibration tokens and feed the moments."""
