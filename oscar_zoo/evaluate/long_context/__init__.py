"""Questions about long prompts: the families of RULER, over length and depth."""
