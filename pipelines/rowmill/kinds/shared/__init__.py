"""What several kinds read records with: messages, reasoning, tools, flags, filters, splits."""
