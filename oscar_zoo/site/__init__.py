"""What the zoo has, as people see it: lists, descriptions, scores, cards and the static page."""
