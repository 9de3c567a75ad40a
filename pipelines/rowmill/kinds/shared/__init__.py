"""What several kinds read records with: columns, messages, reasoning, tools, filters, splits."""
