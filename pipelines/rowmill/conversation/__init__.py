"""Conversations before tokenization: chat templates, renders with proven owners, loss masks, truncation by structure.

renderer.py            conversation → text; who owns which character
loss_mask.py           which characters train, verified on every row
truncation.py          remove whole exchanges and messages until a conversation fits
mask_judge.py          independent check of a mask; template_proof.py runs it on probe conversations
"""
