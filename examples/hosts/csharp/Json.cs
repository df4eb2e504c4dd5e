using System;
using System.Collections;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;
using System.Numerics;
using System.Text;

/// <summary>
/// Reads and writes JSON as Python does: NaN, Infinity and -Infinity are numbers, which System.Text.Json refuses.
/// Objects are dictionaries, arrays lists, integers long or BigInteger, other numbers double.
/// </summary>
sealed class Json
{
    const int MaxDepth = 100;
    readonly string text;
    int place;

    Json(string text)
    {
        this.text = text;
    }

    /// <summary>Throws a FormatException if the text is no JSON.</summary>
    public static object Parse(string text)
    {
        var json = new Json(text);
        object value = json.Value(0);
        json.SkipSpaces();
        if (json.place < text.Length) throw json.Wrong("the end");
        return value;
    }

    public static Dictionary<string, object> Object(object value)
    {
        return value as Dictionary<string, object> ?? throw new FormatException("expected an object, received " + Write(value));
    }

    public static List<object> List(object value)
    {
        return value as List<object> ?? throw new FormatException("expected a list, received " + Write(value));
    }

    /// <summary>Returns the objects of a list; an absent list is empty, as artifacts of earlier versions lack some.</summary>
    public static List<Dictionary<string, object>> Objects(Dictionary<string, object> value, string key)
    {
        return List(Get(value, key) ?? new List<object>()).Select(Object).ToList();
    }

    public static string Text(object value)
    {
        return value as string ?? throw new FormatException("expected a text, received " + Write(value));
    }

    public static long Integer(object value)
    {
        if (value is long integer) return integer;
        throw new FormatException("expected an integer of 64 bits, received " + Write(value));
    }

    public static double Number(object value)
    {
        if (value is double real) return real;
        return Integer(value);
    }

    public static long[] Sizes(object value)
    {
        long[] sizes = List(value).Select(Integer).ToArray();
        if (sizes.Any(size => size < 0)) throw new FormatException("a size is negative: " + Write(value));
        return sizes;
    }

    /// <summary>Returns the value of a key, or null.</summary>
    public static object Get(Dictionary<string, object> value, string key)
    {
        return value.TryGetValue(key, out object found) ? found : null;
    }

    /// <summary>Writes JSON without spaces and without escapes beyond ASCII, which is what digests are computed over.</summary>
    public static string Write(object value)
    {
        if (value is string text) return Quoted(text);
        if (value is bool truth) return truth ? "true" : "false";
        if (value is double real)
        {
            if (double.IsInfinity(real)) return real > 0 ? "Infinity" : "-Infinity";
            return real.ToString("R", CultureInfo.InvariantCulture);
        }
        if (value is IDictionary<string, object> fields)
            return "{" + string.Join(",", fields.Select(field => Quoted(field.Key) + ":" + Write(field.Value))) + "}";
        if (value is IEnumerable items) return "[" + string.Join(",", items.Cast<object>().Select(Write)) + "]";
        return value == null ? "null" : Convert.ToString(value, CultureInfo.InvariantCulture);
    }

    static string Quoted(string value)
    {
        var result = new StringBuilder("\"");
        foreach (char letter in value)
        {
            int control = "\b\f\n\r\t".IndexOf(letter);
            if (letter == '"' || letter == '\\') result.Append('\\').Append(letter);
            else if (control >= 0) result.Append('\\').Append("bfnrt"[control]);
            else if (letter < 0x20) result.Append("\\u").Append(((int)letter).ToString("x4"));
            else result.Append(letter);
        }
        return result.Append('"').ToString();
    }

    FormatException Wrong(string expected)
    {
        return new FormatException("no JSON: expected " + expected + " at character " + place);
    }

    void SkipSpaces()
    {
        while (place < text.Length && " \t\r\n".IndexOf(text[place]) >= 0) place++;
    }

    bool Take(string word)
    {
        if (string.CompareOrdinal(text, place, word, 0, word.Length) != 0) return false;
        place += word.Length;
        return true;
    }

    bool TakeMark(string mark)
    {
        SkipSpaces();
        return Take(mark);
    }

    object Value(int depth)
    {
        if (depth > MaxDepth) throw Wrong("fewer brackets");
        if (TakeMark("{"))
        {
            var fields = new Dictionary<string, object>();
            if (TakeMark("}")) return fields;
            do
            {
                SkipSpaces();
                string key = String();
                if (!TakeMark(":")) throw Wrong("':'");
                if (fields.ContainsKey(key)) throw Wrong("another key than '" + key + "'");
                fields[key] = Value(depth + 1);
            } while (TakeMark(","));
            if (!TakeMark("}")) throw Wrong("'}'");
            return fields;
        }
        if (TakeMark("["))
        {
            var list = new List<object>();
            if (TakeMark("]")) return list;
            do
            {
                list.Add(Value(depth + 1));
            } while (TakeMark(","));
            if (!TakeMark("]")) throw Wrong("']'");
            return list;
        }
        if (place < text.Length && text[place] == '"') return String();
        if (Take("true")) return true;
        if (Take("false")) return false;
        if (Take("null")) return null;
        if (Take("NaN")) return double.NaN;
        if (Take("Infinity")) return double.PositiveInfinity;
        if (Take("-Infinity")) return double.NegativeInfinity;
        return ReadNumber();
    }

    object ReadNumber()
    {
        int begin = place;
        while (place < text.Length && "+-.eE0123456789".IndexOf(text[place]) >= 0) place++;
        string digits = text.Substring(begin, place - begin);
        if (digits.Length == 0) throw Wrong("a value");
        if (digits.IndexOfAny(new[] { '.', 'e', 'E' }) >= 0) return double.Parse(digits, CultureInfo.InvariantCulture);
        BigInteger integer = BigInteger.Parse(digits, CultureInfo.InvariantCulture);
        if (integer < long.MinValue || integer > long.MaxValue) return integer;
        return (long)integer;
    }

    string String()
    {
        if (!Take("\"")) throw Wrong("a text");
        var result = new StringBuilder();
        while (place < text.Length && text[place] != '"')
        {
            char letter = text[place++];
            if (letter == '\\' && place < text.Length)
            {
                letter = text[place++];
                int control = "bfnrt".IndexOf(letter);
                if (control >= 0) letter = "\b\f\n\r\t"[control];
                else if (letter == 'u') letter = Hexadecimal();
            }
            result.Append(letter);
        }
        if (!Take("\"")) throw Wrong("'\"'");
        return result.ToString();
    }

    char Hexadecimal()
    {
        if (place + 4 > text.Length) throw Wrong("four digits");
        place += 4;
        return (char)int.Parse(text.Substring(place - 4, 4), NumberStyles.AllowHexSpecifier, CultureInfo.InvariantCulture);
    }
}
