import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.Map;

/** A tensor: its dtype by the name in manifests, its sizes, and its elements as little-endian bytes. */
final class Tensor {
  private static final Map<String, Integer> BYTES =
      Map.of("float32", 4, "float64", 8, "float16", 2, "int64", 8, "int32", 4, "int16", 2, "int8", 1, "uint8", 1, "bool", 1);

  final String dtype;
  final long[] shape;
  final byte[] bytes;

  Tensor(String dtype, long[] shape, byte[] bytes) {
    this.dtype = dtype;
    this.shape = shape;
    this.bytes = bytes;
    if (size(dtype, shape) != bytes.length) {
      throw new IllegalArgumentException(bytes.length + " bytes are no " + dtype + Arrays.toString(shape));
    }
  }

  static Tensor of(float value) {
    return new Tensor("float32", new long[0], buffer(4).putFloat(value).array());
  }

  static Tensor of(long[] shape, long... values) {
    ByteBuffer buffer = buffer(8 * values.length);
    for (long value : values) buffer.putLong(value);
    return new Tensor("int64", shape, buffer.array());
  }

  /** Makes a moment whose elements all have one value. */
  static Tensor filled(String dtype, long[] shape, double value) {
    ByteBuffer buffer = buffer(Math.toIntExact(size(dtype, shape)));
    while (buffer.hasRemaining()) {
      if (dtype.equals("float32")) buffer.putFloat((float) value);
      else if (dtype.equals("float64")) buffer.putDouble(value);
      else throw new IllegalArgumentException("moments of " + dtype + " are not supported");
    }
    return new Tensor(dtype, shape, buffer.array());
  }

  /** Returns the number of bytes. */
  static long size(String dtype, long[] shape) {
    if (!BYTES.containsKey(dtype)) throw new IllegalArgumentException("the dtype '" + dtype + "' is not supported");
    long size = BYTES.get(dtype);
    for (long length : shape) size = Math.multiplyExact(size, length);
    return size;
  }

  int count() {
    return bytes.length / BYTES.get(dtype);
  }

  boolean isFloat() {
    return dtype.startsWith("float");
  }

  /** Returns the element at an index of a floating-point tensor; for float16, 0, infinity or NaN. */
  double real(int index) {
    ByteBuffer buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    if (dtype.equals("float32")) return buffer.getFloat(4 * index);
    if (dtype.equals("float64")) return buffer.getDouble(8 * index);
    // An exponent of ones is infinity, or NaN if another bit follows.
    int magnitude = buffer.getShort(2 * index) & 0x7FFF;
    if (magnitude > 0x7C00) return Double.NaN;
    return magnitude == 0x7C00 ? Double.POSITIVE_INFINITY : 0;
  }

  /** True if no element of a floating-point tensor is NaN or infinite. */
  boolean isFinite() {
    for (int index = 0; index < count(); index++) if (!Double.isFinite(real(index))) return false;
    return true;
  }

  /** Returns the element at an index of a tensor of integers. */
  long integer(int index) {
    ByteBuffer buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    switch (dtype) {
      case "int64": return buffer.getLong(8 * index);
      case "int32": return buffer.getInt(4 * index);
      case "int16": return buffer.getShort(2 * index);
      case "int8": return bytes[index];
      case "uint8": return bytes[index] & 0xFF;
      default: throw new IllegalArgumentException("labels of " + dtype + " are not supported");
    }
  }

  String signature() {
    return dtype + Json.write(shape);
  }

  private static ByteBuffer buffer(int size) {
    return ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN);
  }
}
