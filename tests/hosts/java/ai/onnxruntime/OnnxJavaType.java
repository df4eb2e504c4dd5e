package ai.onnxruntime;

public enum OnnxJavaType {
  FLOAT("float32"), DOUBLE("float64"), INT8("int8"), INT16("int16"), INT32("int32"), INT64("int64"), BOOL("bool"),
  STRING("str"), UINT8("uint8"), FLOAT16("float16"), BFLOAT16("bfloat16"), UNKNOWN("unknown");

  final String numpy;

  OnnxJavaType(String numpy) {
    this.numpy = numpy;
  }
}
