"""`verify_step`: whether anyone's train step keeps the law, and if not, why. It sees the step from outside."""
