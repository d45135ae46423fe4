"""What an artifact is: names, manifest, formats, reader, writer, verification.

Needs neither torch nor a network.
"""
