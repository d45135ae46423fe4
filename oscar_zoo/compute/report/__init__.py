"""What a person looks at after a fit: one page, one picture, and the numbers behind both."""
