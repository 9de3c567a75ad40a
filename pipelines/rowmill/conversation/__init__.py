"""Conversations before tokenization: chat templates, rendering with spans, loss masks, truncation by structure.

What belongs here: everything that works on the messages and the rendered text of a conversation. What does not:
tokens (`tokenization/`), reading raw records (`formats/`).

    template_contract.py   types shared by rendering and masking
    rendering/             conversation → text, with the span of every message
    masking/               which characters train, verified on every row
    truncation.py          remove whole exchanges and messages until a conversation fits
    mask_judge.py          independent check of a mask; template_proof.py runs it on probe conversations
"""
