"""What a site's policy is made of: its file, what may be built, whose options are whose."""
