"""What an artifact is: names, manifest, formats, reader, writer and verification. Needs neither
torch nor a network."""
