package ai.onnxruntime;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** Refuses what the real class would misread: buffers that are not direct, or of another byte order. */
public class OnnxTensor extends OnnxTensorLike {
  private final ByteBuffer data;
  private final TensorInfo info;
  private boolean closed = false;

  OnnxTensor(ByteBuffer data, TensorInfo info) {
    this.data = data;
    this.info = info;
  }

  public static OnnxTensor createTensor(OrtEnvironment environment, ByteBuffer data, long[] shape, OnnxJavaType type)
      throws OrtException {
    if (!data.isDirect() || data.order() != ByteOrder.nativeOrder() || data.position() != 0) throw new OrtException("buffer");
    return new OnnxTensor(data, new TensorInfo(type, shape));
  }

  public ByteBuffer getByteBuffer() {
    if (closed) throw new IllegalStateException("the tensor is closed");
    ByteBuffer copy = ByteBuffer.allocate(data.capacity()).order(ByteOrder.nativeOrder());
    copy.put(data.duplicate().rewind()).rewind();
    return copy;
  }

  public TensorInfo getInfo() {
    return info;
  }

  @Override
  public void close() {
    if (closed) throw new IllegalStateException("the tensor is closed twice");
    closed = true;
  }
}
