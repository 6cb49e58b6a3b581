"""Training of draft heads: EAGLE-3, EAGLE 3.1, P-EAGLE and Medusa, for one target, on any text or chats."""
