import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Map;

/** Files with weights that the models of a run share (docs/reference/file-formats.md, "data_files"). */
final class DataFiles {
  private DataFiles() {}

  /** Throws, with the name of the file, if one is missing or not the one that the artifacts were written with. */
  static void check(Path artifacts, Map<String, Object> manifest) throws IOException {
    for (Map.Entry<String, Object> entry : Json.object(manifest.getOrDefault("data_files", Map.of())).entrySet()) {
      Path path = artifacts.resolve(entry.getKey());
      Map<String, Object> expected = Json.object(entry.getValue());
      if (!Files.isRegularFile(path)) {
        throw new IllegalArgumentException("'" + path + "', which holds weights of the models, is missing");
      }
      // The size first: it tells most wrong files, and costs nothing.
      if (Files.size(path) != Json.integer(expected.get("bytes")) || !digestOf(path).equals(expected.get("sha256"))) {
        throw new IllegalArgumentException("'" + path + "' is not the file with which these artifacts were written. Put the "
            + "original file there, or generate the artifacts again from the new one");
      }
    }
  }

  private static String digestOf(Path path) throws IOException {
    try (InputStream file = Files.newInputStream(path)) {
      MessageDigest digest = MessageDigest.getInstance("SHA-256");
      byte[] chunk = new byte[1 << 20];
      for (int size = file.read(chunk); size >= 0; size = file.read(chunk)) digest.update(chunk, 0, size);
      return hexadecimal(digest.digest());
    } catch (NoSuchAlgorithmException error) {
      throw new IllegalStateException(error);
    }
  }

  static String hexadecimal(byte[] bytes) {
    StringBuilder text = new StringBuilder();
    for (byte part : bytes) text.append(String.format("%02x", part));
    return text.toString();
  }
}
