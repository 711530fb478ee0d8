"""Rules that withstand a number of clients which send what they like."""
