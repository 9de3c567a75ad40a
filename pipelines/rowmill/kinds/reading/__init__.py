"""Reading records by a dataset's options: the shapes of chats, the canonical row, and the recognition of a kind."""
