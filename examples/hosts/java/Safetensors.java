import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** A safetensors file: the length of the header, the header as JSON, then the tensors. */
final class Safetensors {
  private static final Map<String, String> DTYPES =
      Map.of("F32", "float32", "F64", "float64", "F16", "float16", "I64", "int64", "I32", "int32", "I16", "int16",
          "I8", "int8", "U8", "uint8", "BOOL", "bool");

  final Map<String, String> metadata = new LinkedHashMap<>();
  final Map<String, Tensor> tensors = new LinkedHashMap<>();

  /** Throws IllegalArgumentException if the file is damaged. */
  static Safetensors read(Path path) throws IOException {
    byte[] data = Files.readAllBytes(path);
    long length = data.length < 8 ? -1 : ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN).getLong();
    if (length < 2 || length > data.length - 8) throw damaged("it is truncated, or no safetensors file");
    int start = 8 + (int) length;
    Safetensors file = new Safetensors();
    List<long[]> places = new ArrayList<>();
    String header = new String(data, 8, (int) length, StandardCharsets.UTF_8);
    for (Map.Entry<String, Object> entry : Json.object(Json.parse(header)).entrySet()) {
      Map<String, Object> value = Json.object(entry.getValue());
      if (entry.getKey().equals("__metadata__")) {
        value.forEach((key, text) -> file.metadata.put(key, Json.text(text)));
        continue;
      }
      long[] offsets = Json.sizes(value.get("data_offsets"));
      if (offsets.length != 2 || offsets[0] > offsets[1] || offsets[1] > data.length - start) {
        throw damaged("it is truncated in the tensor '" + entry.getKey() + "'");
      }
      byte[] bytes = java.util.Arrays.copyOfRange(data, start + (int) offsets[0], start + (int) offsets[1]);
      String dtype = DTYPES.getOrDefault(Json.text(value.get("dtype")), "unknown");
      file.tensors.put(entry.getKey(), new Tensor(dtype, Json.sizes(value.get("shape")), bytes));
      places.add(offsets);
    }
    // The tensors fill the file without gaps: a damaged offset would give numbers of another tensor.
    places.sort(Comparator.<long[]>comparingLong(place -> place[0]).thenComparingLong(place -> place[1]));
    long end = 0;
    for (long[] place : places) {
      if (place[0] != end) throw damaged("its tensors overlap or leave gaps");
      end = place[1];
    }
    if (start + end != data.length) throw damaged("it is too long");
    return file;
  }

  /** Writes a new file, flushes it, renames it, and flushes the folder. */
  void write(Path path) throws IOException {
    Map<String, Object> header = new TreeMap<>();
    header.put("__metadata__", metadata);
    long end = 0;
    for (Map.Entry<String, Tensor> entry : tensors.entrySet()) {
      Tensor tensor = entry.getValue();
      long[] offsets = {end, end += tensor.bytes.length};
      String code = DTYPES.entrySet().stream().filter(x -> x.getValue().equals(tensor.dtype)).findFirst().get().getKey();
      header.put(entry.getKey(), Map.of("dtype", code, "shape", tensor.shape, "data_offsets", offsets));
    }
    byte[] text = Json.write(header).getBytes(StandardCharsets.UTF_8);
    int padded = (text.length + 7) / 8 * 8;
    ByteBuffer begin = ByteBuffer.allocate(8 + padded).order(ByteOrder.LITTLE_ENDIAN).putLong(padded).put(text);
    while (begin.hasRemaining()) begin.put((byte) ' ');
    Path target = path.toAbsolutePath();
    Path temporary = target.resolveSibling(target.getFileName() + ".tmp");
    try {
      try (FileChannel file = FileChannel.open(
          temporary, StandardOpenOption.CREATE, StandardOpenOption.TRUNCATE_EXISTING, StandardOpenOption.WRITE)) {
        writeAll(file, begin.flip());
        for (Tensor tensor : tensors.values()) writeAll(file, ByteBuffer.wrap(tensor.bytes));
        file.force(true);
      }
      Files.move(temporary, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    } finally {
      Files.deleteIfExists(temporary);
    }
    // The file is complete. Windows cannot open folders, and writes renames to the disk itself.
    try (FileChannel folder = FileChannel.open(target.getParent(), StandardOpenOption.READ)) {
      folder.force(true);
    } catch (IOException ignored) {
      return;
    }
  }

  private static void writeAll(FileChannel file, ByteBuffer buffer) throws IOException {
    while (buffer.hasRemaining()) file.write(buffer);
  }

  private static IllegalArgumentException damaged(String how) {
    return new IllegalArgumentException(how);
  }
}
