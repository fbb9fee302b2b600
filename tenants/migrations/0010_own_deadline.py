import tenants.models.tier
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0009_append_only'),
    ]

    operations = [
        migrations.AlterField(
            model_name='tier',
            name='min_slo_threshold',
            field=models.FloatField(blank=True, help_text="seconds; empty: the tier's own deadline", null=True, validators=[tenants.models.tier.finite, tenants.models.tier.above_zero]),
        ),
    ]
