import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Reads and writes JSON as Python does: NaN, Infinity and -Infinity are numbers.
 *
 * <p>Objects are Maps, arrays Lists, integers Long or BigInteger, other numbers Double.
 */
final class Json {
  private static final int MAX_DEPTH = 100;
  private final String text;
  private int place = 0;

  private Json(String text) {
    this.text = text;
  }

  /** Throws IllegalArgumentException if the text is no JSON. */
  static Object parse(String text) {
    Json json = new Json(text);
    Object value = json.value(0);
    json.skipSpaces();
    if (json.place < text.length()) throw json.wrong("the end");
    return value;
  }

  @SuppressWarnings("unchecked")
  static Map<String, Object> object(Object value) {
    if (value instanceof Map) return (Map<String, Object>) value;
    throw new IllegalArgumentException("expected an object, received " + write(value));
  }

  @SuppressWarnings("unchecked")
  static List<Object> list(Object value) {
    if (value instanceof List) return (List<Object>) value;
    throw new IllegalArgumentException("expected a list, received " + write(value));
  }

  static String text(Object value) {
    if (value instanceof String) return (String) value;
    throw new IllegalArgumentException("expected a text, received " + write(value));
  }

  static long integer(Object value) {
    if (value instanceof Long) return (Long) value;
    throw new IllegalArgumentException("expected an integer of 64 bits, received " + write(value));
  }

  static double number(Object value) {
    if (value instanceof Number) return ((Number) value).doubleValue();
    throw new IllegalArgumentException("expected a number, received " + write(value));
  }

  static long[] sizes(Object value) {
    long[] sizes = list(value).stream().mapToLong(Json::integer).toArray();
    for (long size : sizes) if (size < 0) throw new IllegalArgumentException("a size is negative: " + write(value));
    return sizes;
  }

  /** Writes JSON without spaces and without escapes beyond ASCII, which is what digests are computed over. */
  static String write(Object value) {
    StringBuilder result = new StringBuilder();
    append(result, value);
    return result.toString();
  }

  private static void append(StringBuilder result, Object value) {
    String separator = "";
    if (value instanceof Map) {
      result.append('{');
      for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
        result.append(separator);
        append(result, entry.getKey());
        result.append(':');
        append(result, entry.getValue());
        separator = ",";
      }
      result.append('}');
    } else if (value instanceof List) {
      result.append('[');
      for (Object item : (List<?>) value) {
        result.append(separator);
        append(result, item);
        separator = ",";
      }
      result.append(']');
    } else if (value instanceof long[]) {
      List<Object> sizes = new ArrayList<>();
      for (long size : (long[]) value) sizes.add(size);
      append(result, sizes);
    } else if (value instanceof String) {
      appendText(result, (String) value);
    } else {
      result.append(value);
    }
  }

  private static void appendText(StringBuilder result, String value) {
    result.append('"');
    for (char letter : value.toCharArray()) {
      int control = "\b\f\n\r\t".indexOf(letter);
      if (letter == '"' || letter == '\\') result.append('\\').append(letter);
      else if (control >= 0) result.append('\\').append("bfnrt".charAt(control));
      else if (letter < 0x20) result.append(String.format("\\u%04x", (int) letter));
      else result.append(letter);
    }
    result.append('"');
  }

  private IllegalArgumentException wrong(String expected) {
    return new IllegalArgumentException("no JSON: expected " + expected + " at character " + place);
  }

  private void skipSpaces() {
    while (place < text.length() && " \t\r\n".indexOf(text.charAt(place)) >= 0) place++;
  }

  private boolean take(String word) {
    if (!text.startsWith(word, place)) return false;
    place += word.length();
    return true;
  }

  private boolean takeMark(String mark) {
    skipSpaces();
    return take(mark);
  }

  private Object value(int depth) {
    if (depth > MAX_DEPTH) throw wrong("fewer brackets");
    if (takeMark("{")) {
      Map<String, Object> object = new LinkedHashMap<>();
      if (takeMark("}")) return object;
      do {
        skipSpaces();
        String key = string();
        if (!takeMark(":")) throw wrong("':'");
        if (object.containsKey(key)) throw wrong("another key than '" + key + "'");
        object.put(key, value(depth + 1));
      } while (takeMark(","));
      if (!takeMark("}")) throw wrong("'}'");
      return object;
    }
    if (takeMark("[")) {
      List<Object> list = new ArrayList<>();
      if (takeMark("]")) return list;
      do {
        list.add(value(depth + 1));
      } while (takeMark(","));
      if (!takeMark("]")) throw wrong("']'");
      return list;
    }
    if (place < text.length() && text.charAt(place) == '"') return string();
    if (take("true")) return true;
    if (take("false")) return false;
    if (take("null")) return null;
    if (take("NaN")) return Double.NaN;
    if (take("Infinity")) return Double.POSITIVE_INFINITY;
    if (take("-Infinity")) return Double.NEGATIVE_INFINITY;
    int begin = place;
    while (place < text.length() && "+-.eE0123456789".indexOf(text.charAt(place)) >= 0) place++;
    String digits = text.substring(begin, place);
    if (!digits.matches("-?[0-9]+")) {
      if (digits.isEmpty()) throw wrong("a value");
      return Double.valueOf(digits);
    }
    BigInteger integer = new BigInteger(digits);
    if (integer.bitLength() > 63) return integer;
    return integer.longValue();
  }

  private String string() {
    if (!take("\"")) throw wrong("a text");
    StringBuilder result = new StringBuilder();
    while (place < text.length() && text.charAt(place) != '"') {
      char letter = text.charAt(place++);
      if (letter == '\\' && place < text.length()) {
        letter = text.charAt(place++);
        int control = "bfnrt".indexOf(letter);
        if (control >= 0) letter = "\b\f\n\r\t".charAt(control);
        else if (letter == 'u') letter = hexadecimal();
      }
      result.append(letter);
    }
    if (!take("\"")) throw wrong("'\"'");
    return result.toString();
  }

  private char hexadecimal() {
    if (place + 4 > text.length()) throw wrong("four digits");
    place += 4;
    return (char) Integer.parseInt(text.substring(place - 4, place), 16);
  }
}
