"""Starting, watching and stopping SGLang processes of our own. Nothing here runs inside a
worker."""
