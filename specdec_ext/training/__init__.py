"""Train draft heads (EAGLE-3, EAGLE 3.1, P-EAGLE, Medusa) for one target, on any texts or chats."""
