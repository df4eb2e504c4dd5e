using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography;

/// <summary>Files with weights that the models of a run share (docs/reference/file-formats.md, "data_files").</summary>
static class DataFiles
{
    /// <summary>
    /// Throws, with the name of the file, if one is missing or not the one that the artifacts were written with.
    /// </summary>
    public static void Check(string artifacts, Dictionary<string, object> manifest)
    {
        object listed = Json.Get(manifest, "data_files");
        if (listed == null) return;
        foreach (KeyValuePair<string, object> entry in Json.Object(listed))
        {
            string path = Path.Combine(artifacts, entry.Key);
            Dictionary<string, object> expected = Json.Object(entry.Value);
            if (!File.Exists(path)) throw new FormatException("'" + path + "', which holds weights of the models, is missing");
            // The size first: it tells most wrong files, and costs nothing.
            if (new FileInfo(path).Length != Json.Integer(expected["bytes"]) || DigestOf(path) != Json.Text(expected["sha256"]))
                throw new FormatException("'" + path + "' is not the file with which these artifacts were written. Put the "
                    + "original file there, or generate the artifacts again from the new one");
        }
    }

    static string DigestOf(string path)
    {
        using (FileStream file = File.OpenRead(path))
        using (SHA256 digest = SHA256.Create())
            return Hexadecimal(digest.ComputeHash(file));
    }

    public static string Hexadecimal(byte[] bytes)
    {
        return string.Concat(bytes.Select(part => part.ToString("x2")));
    }
}
