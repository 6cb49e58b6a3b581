"""Cache layers that can be rolled back; ``SlotTarget.commit`` and ``HostedTarget.commit`` roll them back."""
