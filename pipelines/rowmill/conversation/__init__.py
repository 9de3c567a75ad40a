"""Conversations before tokenization: chat templates, renders with proven owners, loss masks, truncation by structure.

`README.md` in this folder has the drawing, a row with its characters, and where each decision is made.
"""
