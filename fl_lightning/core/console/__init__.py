"""What a terminal shows: messages laid out for its width, and lines that stay below them."""
