"""Colours that charts share."""

PAPER, INK, MUTED, RULE, FAINT = "#ffffff", "#1c2128", "#5d6670", "#d5dae0", "#a9b1ba"
K_SIDE, V_SIDE = "#0b6aa8", "#b34a06"
