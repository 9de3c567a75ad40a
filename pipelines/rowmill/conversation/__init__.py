"""Conversations: what a chat template does, rendering with spans, loss masks, truncation by structure.

What belongs here: everything that is known of a template and a conversation before tokens exist. What does not:
tokens (`tokenization/`), reading raw records (`formats/`).

    template_contract.py   what rendering and masking must both know
    rendering/             a conversation to text, and which characters are whose
    masking/               which characters train, verified on every row
    truncation.py          shorter by whole turns and messages
    mask_judge.py          an independent judge of masks; template_proof.py runs it on probe conversations
"""
