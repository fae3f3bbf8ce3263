"""Pictures of a run: the page, TensorBoard, and whatever tracker a person has."""
