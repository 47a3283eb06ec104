"""What runs on the device: functions that Triton compiles. They know pointers and strides; the modules beside know tensors."""
