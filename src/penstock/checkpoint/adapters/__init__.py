"""Adapters (LoRA) as PEFT saves them: folders checked against the model that they add to. No torch."""
