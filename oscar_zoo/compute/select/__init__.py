"""Which transforms to keep: candidates, their measured errors, clip ratios, gates and the rule."""
