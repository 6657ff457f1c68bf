"""Images: data sets, the order of the classes, augmentation, exemplars."""
